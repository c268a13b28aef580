"""What the core does not name: every room is entered through one seam (`lookahead.utils.seams`)."""
