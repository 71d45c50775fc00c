"""What people see of a plan: tables for the terminal, a page, a trace."""
