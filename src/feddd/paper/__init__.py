"""The paper's figures: what each one needs, how it is drawn, and what the paper says beside what was measured."""
