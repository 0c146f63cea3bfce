class ScalingConfig:
    def __init__(self, **options):
        pass


class _Context:
    def get_world_rank(self):
        return 0


def get_context():
    return _Context()
