class DictConfig(dict):
    """Keys are attributes, at every depth."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class OmegaConf:
    @staticmethod
    def create(tree):
        if isinstance(tree, dict):
            return DictConfig({key: OmegaConf.create(child) for key, child in tree.items()})
        return tree

    @staticmethod
    def to_container(config, resolve):
        return dict(config)
