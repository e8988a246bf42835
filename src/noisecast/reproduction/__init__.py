"""The paper's figures and tables, one a file: what it asks, what it claims, how it is drawn."""
