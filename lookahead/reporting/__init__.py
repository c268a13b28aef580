"""HTML reports about results files and decoding traces."""
