"""Reinforcement learning of continuous control: PPO on environments of gymnasium."""
