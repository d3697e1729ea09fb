#pragma once
#include "benchmarks/harness/bench.h"

#include <iosfwd>
#include <string>

namespace tessera::bench {

// Runs benchmarks/peers/NAME.py, which prints one line {"case": .., "value": .., "plain": ..} per case ("plain" is
// optional). If the script or a Python with torch is missing, prints one line to `log` and returns no figures.
PeerFigures run_peer(const std::string& bench, std::ostream& log);

// Parses the output of a peer script. Throws UsageError for other text.
PeerFigures parse_peer_lines(const std::string& text);

}  // namespace tessera::bench
