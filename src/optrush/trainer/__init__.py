"""From a resolved configuration to a trained model: the state and the loop, building it, running it, its folder."""
