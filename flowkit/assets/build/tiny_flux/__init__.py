"""tiny-flux, words in pictures: five stages, a file each."""
