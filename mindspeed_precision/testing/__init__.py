"""What tests and the demo train with: public, so that a user can test patches of their own with it."""
