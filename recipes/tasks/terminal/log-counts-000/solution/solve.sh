#!/bin/bash
set -e
awk '$3 == "ERROR:" && /^[0-9]/ {gsub(/[][]/,x,$2); print $2}' app.log |
    sort | uniq -c | sort -k1,1nr -k2,2 | awk '{print $2, $1}' > counts.txt
