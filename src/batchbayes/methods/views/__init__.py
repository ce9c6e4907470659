"""Views: each draw sees its own random view of the inputs."""
