"""What the HTTP servers share: error answers, fields of answers, and event streams."""
