"""The demo: start a server, rollout workers and a learner, and watch them from one terminal."""
