"""Speed, memory and accuracy of linrec's operators, beside a copy of the same bytes and beside peers."""
