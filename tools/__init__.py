"""Tools for the people who work on this repository. Not part of the installed package."""
