#include "tessera/base/error.h"
#include "tessera/mesh/device_mesh.h"

#include <charconv>
#include <ostream>

// Prints and parses "dp=2,tp=4" with names, "2x4" without.
namespace tessera {
namespace {

int64_t parse_extent(std::string_view digits, std::string_view text) {
  int64_t extent = 0;
  auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), extent);
  TESSERA_CHECK(!digits.empty() && error == std::errc() && end == digits.data() + digits.size() && extent > 0,
                UsageError, "mesh '", text, "': '", digits,
                "' is not a number of ranks; write \"dp=2,tp=4\" or \"2x4\"");
  return extent;
}

template <class Visit>
void split(std::string_view text, char at, Visit visit) {
  for (;;) {
    const size_t end = text.find(at);
    visit(text.substr(0, end));
    if (end == std::string_view::npos) return;
    text.remove_prefix(end + 1);
  }
}

void check_ranks(const MeshShape& mesh, std::string_view text) {
  int64_t ranks = 1;
  for (const int64_t extent : mesh.shape)
    TESSERA_CHECK(!__builtin_mul_overflow(ranks, extent, &ranks), UsageError, "mesh '", text,
                  "' has more than 2^63 ranks");
}

}  // namespace

MeshShape parse_mesh_shape(std::string_view text) {
  MeshShape mesh;
  if (text.find('=') == std::string_view::npos) {
    split(text, 'x', [&](std::string_view part) { mesh.shape.push_back(parse_extent(part, text)); });
    check_ranks(mesh, text);
    return mesh;
  }
  split(text, ',', [&](std::string_view part) {
    const size_t equals = part.find('=');
    TESSERA_CHECK(equals != std::string_view::npos && equals > 0, UsageError, "mesh '", text, "': '", part,
                  "' has no name; write \"dp=2,tp=4\", every axis with a name, or \"2x4\"");
    const std::string name(part.substr(0, equals));
    for (const auto& known : mesh.names)
      TESSERA_CHECK(known != name, UsageError, "mesh '", text, "': axis '", name, "' is given twice");
    mesh.names.push_back(name);
    mesh.shape.push_back(parse_extent(part.substr(equals + 1), text));
  });
  check_ranks(mesh, text);
  return mesh;
}

std::ostream& operator<<(std::ostream& out, const MeshShape& mesh) {
  for (size_t i = 0; i < mesh.shape.size(); i++) {
    if (mesh.names.empty())
      out << (i ? "x" : "") << mesh.shape[i];
    else
      out << (i ? "," : "") << mesh.names[i] << '=' << mesh.shape[i];
  }
  return out;
}

std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh) {
  if (!mesh) return out << "(no mesh)";
  return out << MeshShape{mesh.shape(), mesh.names()};
}

}  // namespace tessera
