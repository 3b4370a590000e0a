"""Plans pipeline schedules and predicts their time and memory; never imports torch."""
