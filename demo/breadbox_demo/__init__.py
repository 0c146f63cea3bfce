"""The demo: a server, rollout workers and a learner, started and watched from one terminal."""
