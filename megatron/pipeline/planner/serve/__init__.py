"""The playground behind ``mpipe serve``: a page to try schedules on, answered by what the commands answer."""
