"""A server for a small number of users: its application, and the loop that decodes their requests together."""
