#include "benchmarks/harness/peer.h"

#include "tessera/base/detail/child_process.h"
#include "tessera/base/detail/json.h"
#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"
#include "tessera/cli/paths.h"

#include <filesystem>
#include <ostream>
#include <sstream>

namespace tessera::bench {
namespace {

namespace fs = std::filesystem;

// The folder of peer scripts: searched upwards from the working directory and from the program.
fs::path find_peers() {
  if (setting_is_set("TESSERA_PEERS")) return setting("TESSERA_PEERS");
  for (const fs::path& start : {fs::current_path(), cli::program_path().parent_path()})
    for (fs::path at = start;; at = at.parent_path()) {
      if (fs::is_directory(at / "benchmarks" / "peers")) return at / "benchmarks" / "peers";
      if (at == at.parent_path()) break;
    }
  return {};
}

bool has_torch(const std::string& python) {  // without importing it, which takes seconds
  const char* script = "import importlib.util as u, sys; sys.exit(not u.find_spec('torch'))";
  return run_child({python, "-c", script}, ChildErrors::Dropped).exit_code == 0;
}

std::string find_python(const fs::path& peers) {
  if (setting_is_set("TESSERA_PYTHON")) return setting("TESSERA_PYTHON");
  const std::string candidates[] = {
      (peers / "../../.venv/bin/python").string(),
      (cli::libtorch_path() / "../../../../bin/python").string(),  // of the wheel whose LibTorch is loaded
      "python3",
  };
  for (const auto& python : candidates)
    if (has_torch(python)) return python;
  return {};
}

std::optional<double> number_of(const Json* json) {
  if (!json) return std::nullopt;
  if (const auto* integer = json->get_if<int64_t>()) return static_cast<double>(*integer);
  if (const auto* real = json->get_if<double>()) return *real;
  return std::nullopt;
}

}  // namespace

PeerFigures parse_peer_lines(const std::string& text) {
  PeerFigures figures;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto object = Json::parse(line, "the output of a peer script");
    const auto value = number_of(object.find("value"));
    TESSERA_CHECK(value, UsageError, "a peer script printed '", line, "'; expected {\"case\": .., \"value\": ..}");
    const Json* plain = object.find("plain");
    TESSERA_CHECK(!plain || number_of(plain), UsageError, "a peer script printed '", line,
                  "'; \"plain\" must be a number");
    figures[object.at("case").text()] = {*value, number_of(plain)};
  }
  return figures;
}

PeerFigures run_peer(const std::string& bench, std::ostream& log) {
  fs::path peers = find_peers();
  fs::path script = peers / (bench + ".py");
  if (peers.empty() || !fs::exists(script)) {  // a benchmark without a peer
    log << "no peer figures: cannot find benchmarks/peers/" << bench << ".py\n";
    return {};
  }
  std::string python = find_python(peers);
  TESSERA_CHECK(!python.empty(), UsageError, "--peer: found no Python with torch; set TESSERA_PYTHON");
  const auto child = run_child({python, script.string()});
  TESSERA_CHECK(child.exit_code == 0, UsageError, "--peer: ", python, " ", script.string(), " failed with exit code ",
                child.exit_code, ". Its packages: tools/bootstrap peers");
  return parse_peer_lines(child.out);
}

}  // namespace tessera::bench
