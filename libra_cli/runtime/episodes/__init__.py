"""Episodes: rendering conversations to tokens, and running environments and their tools."""
