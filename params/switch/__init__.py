"""Switch Transformers, trained by span corruption."""
