"""Trains adapters of several tenants on one model, by the orders of their own training loops."""
