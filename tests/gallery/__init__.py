"""The page of recipes that ran: facts as JSON, and what is made of them: pictures and Markdown."""
