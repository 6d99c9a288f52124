"""Who is told of a run's steps while it goes on; ``protocol`` says what a monitor is."""
