"""What measures and shows the cache: the bench, the lab, the demo's model and text, the survey."""
