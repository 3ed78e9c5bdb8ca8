"""The worker's side of `PipelineScheduler`."""
