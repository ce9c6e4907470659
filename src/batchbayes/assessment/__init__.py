"""The assessment of a trained network on its data: how good is it, and when can it be trusted?"""
