"""What a file of results tells about its job, as one HTML page."""
