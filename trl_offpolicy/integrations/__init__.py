"""The corrections inside other frameworks' trainers: verl, SkyRL, slime, miles, prime-rl. See docs/integrations.md.

Each module is what the framework's own hook loads. It imports that framework when it is called; the one for verl does
so when it is imported, if verl is installed.
The framework keeps its data, advantages, denominators and KL term; the policy loss or the correction is this kit's.
"""
