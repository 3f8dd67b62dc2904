"""What is made of runs for people: the report, the live page, pictures, TensorBoard, advice."""
