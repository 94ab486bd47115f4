"""What a run comes to: intervals, pages of tables, and two runs side by side."""
