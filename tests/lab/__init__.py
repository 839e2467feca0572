"""The lab: a real engine, cache server and store on one machine, under test."""
