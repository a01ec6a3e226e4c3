"""The head that predicts the token after the next (`mtp.*`), trained beside the model that it drafts for."""
