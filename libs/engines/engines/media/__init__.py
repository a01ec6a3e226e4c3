"""Images and videos: checked in a batch, seen by the tower, put in their tokens' places."""
