"""Data, weights and tasks of users: read from files or functions, and checked. What is unclear is refused."""
