"""The page: tables, figures, pictures and charts in one HTML file."""
