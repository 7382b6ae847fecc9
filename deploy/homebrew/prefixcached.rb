# Template of the Homebrew formula. A release fills in @URL@ and @SHA256@ of its sdist, and
# `brew update-python-resources prefixcached` writes the resources of the dependencies.
# brew services cannot hold a Unix socket for the daemon, so the daemon binds it itself.
class Prefixcached < Formula
  include Language::Python::Virtualenv

  desc "Daemon that shares one KV prompt cache between all MLX processes of a user"
  homepage "@HOMEPAGE@"
  url "@URL@"
  sha256 "@SHA256@"
  license "MIT"

  depends_on "python@3.13"

  def install
    virtualenv_install_with_resources
  end

  service do
    run [opt_bin/"prefixcached", "serve", "--log-file", var/"log/prefixcached.log"]
    keep_alive crashed: true
    process_type :interactive
    stop_timeout 30
    log_path var/"log/prefixcached.log"
    error_log_path var/"log/prefixcached.log"
    environment_variables PATH: std_service_path_env
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/prefixcached --version")
    assert_match "no daemon", shell_output("#{bin}/prefixcached status --socket #{testpath}/s 2>&1", 3)
  end
end
