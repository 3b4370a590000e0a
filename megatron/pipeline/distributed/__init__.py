"""Devices, process groups and collectives that can be started now and read later; nothing here knows of schedules."""
