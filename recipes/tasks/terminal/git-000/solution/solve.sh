#!/bin/bash
set -e
cd repo
git log --reverse -Shana_501 --format=%s -- notes.txt | head -n 1 > ../commit.txt
