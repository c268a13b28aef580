"""A server for a handful of users: its application, and the loop that decodes their requests together."""
