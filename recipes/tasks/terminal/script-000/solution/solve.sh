#!/bin/bash
set -e
cat > tool.sh <<'END'
#!/bin/bash
[ $# -eq 0 ] || exit 2
awk 'length > 0 { print length "\t" $0 }' | sort -s -k1,1nr | head -n 2 | cut -f 2-
END
chmod +x tool.sh
