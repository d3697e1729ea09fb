#include "benchmarks/harness/peer.h"

#include "tessera/base/detail/child_process.h"
#include "tessera/base/error.h"
#include "tessera/base/detail/settings.h"
#include "tessera/cli/paths.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>

namespace fs = std::filesystem;

namespace tessera::cli {
namespace {

// The folder of peer scripts, looked for from here and from the program upwards (build/release/bin is in the tree).
fs::path find_peers() {
  if (setting_is_set("TESSERA_PEERS")) return setting("TESSERA_PEERS");
  for (const fs::path& start : {fs::current_path(), program_path().parent_path()})
    for (fs::path at = start;; at = at.parent_path()) {
      if (fs::is_directory(at / "benchmarks" / "peers")) return at / "benchmarks" / "peers";
      if (at == at.parent_path()) break;
    }
  return {};
}

bool has_torch(const std::string& python) {  // found, not imported: that would take seconds
  const char* question = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)";
  return run_child({python, "-c", question}, ChildErrors::Dropped).exit_code == 0;
}

std::string find_python(const fs::path& peers) {
  if (setting_is_set("TESSERA_PYTHON")) return setting("TESSERA_PYTHON");
  const std::string candidates[] = {
      (peers / "../../.venv/bin/python").string(),
      (libtorch_path() / "../../../../bin/python").string(),  // of the wheel that we run on
      "python3",
  };
  for (const auto& python : candidates)
    if (has_torch(python)) return python;
  return {};
}

}  // namespace

PeerFigures parse_peer_lines(const std::string& text) {
  PeerFigures figures;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    bool good = object.is_object() && object.contains("case") && object["case"].is_string() &&
                object.contains("value") && object["value"].is_number() &&
                (!object.contains("plain") || object["plain"].is_number());
    TESSERA_CHECK(good, UsageError, "a peer printed '", line, "', not {\"case\": .., \"value\": ..}");
    PeerFigure& figure = figures[object["case"]];
    figure.value = object["value"];
    if (object.contains("plain")) figure.plain = object["plain"];
  }
  return figures;
}

PeerFigures run_peer(const std::string& bench, std::ostream& log) {
  fs::path peers = find_peers();
  fs::path script = peers / (bench + ".py");
  if (peers.empty() || !fs::exists(script)) {
    log << "no peer: there is no script benchmarks/peers/" << bench << ".py here\n";
    return {};
  }
  std::string python = find_python(peers);
  if (python.empty()) {
    log << "no peer: no Python that has torch was found; TESSERA_PYTHON can name one\n";
    return {};
  }
  auto [exit_code, out] = run_child({python, script.string()});
  if (exit_code != 0) {
    log << "no peer: " << python << ' ' << script.string() << " ended with exit code " << exit_code << '\n';
    return {};
  }
  return parse_peer_lines(out);
}

}  // namespace tessera::cli
