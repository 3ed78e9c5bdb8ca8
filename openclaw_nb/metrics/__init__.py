"""Metrics of this process's cluster for Prometheus: collected, served, found again, and set up with Grafana."""
