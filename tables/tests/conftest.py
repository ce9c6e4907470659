from helpers.fixtures import *  # noqa: F403
