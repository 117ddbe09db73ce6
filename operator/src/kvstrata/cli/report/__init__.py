"""`kubectl kvstrata report`: one HTML file about the use of the cache."""
