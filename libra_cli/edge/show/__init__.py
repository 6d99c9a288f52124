"""What people and scripts are shown: the reader of the journal, status, reports."""
