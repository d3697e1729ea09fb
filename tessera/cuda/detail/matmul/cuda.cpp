#include "tessera/base/error.h"
#include "tessera/cuda/detail/matmul.h"
#include "tessera/cuda/detail/result_cache.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <cublasLt.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <tuple>
#include <vector>

namespace tessera::cuda {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;  // what cuBLAS recommends for this architecture
constexpr int kAlgorithms = 8;
constexpr int kRuns = 4;  // of each algorithm, the first one not measured

void check(cublasStatus_t status, const char* what) {
  TESSERA_CHECK(status == CUBLAS_STATUS_SUCCESS, SystemError, what, ": ", cublasLtGetStatusString(status));
}

// An object of cuBLASLt with its destroy function.
template <class T>
using Owned = std::unique_ptr<std::remove_pointer_t<T>, cublasStatus_t (*)(T)>;

template <class T>
void set(cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check(cublasLtMatmulDescSetAttribute(description, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
}

template <class T>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
        "cublasLtMatmulPreferenceSetAttribute");
}

// A matrix in row-major order is its transpose in the column-major order of cuBLAS. So out = a b is computed as
// out^T = b^T a^T: `b` is the first operand.
struct Operand {
  const void* data;
  int64_t rows, columns, leading;  // of the memory, column by column
  cublasOperation_t operation;

  explicit Operand(const at::Tensor& t) : data(t.const_data_ptr()) {
    const bool by_rows = t.stride(1) == 1;
    rows = by_rows ? t.size(1) : t.size(0);
    columns = by_rows ? t.size(0) : t.size(1);
    leading = std::max(by_rows ? t.stride(0) : t.stride(1), rows);
    operation = by_rows ? CUBLAS_OP_N : CUBLAS_OP_T;
  }
  Owned<cublasLtMatrixLayout_t> layout() const {
    cublasLtMatrixLayout_t made = nullptr;
    check(cublasLtMatrixLayoutCreate(&made, CUDA_R_16BF, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns),
                                     leading),
          "cublasLtMatrixLayoutCreate");
    return {made, cublasLtMatrixLayoutDestroy};
  }
};

// In bytes. No more than algorithms need, so that a tensor at another address has the same algorithm.
uint32_t alignment(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return static_cast<uint32_t>(std::min<uintptr_t>(address & (~address + 1), 16));
}

cublasLtEpilogue_t to_cublas(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::None:
      return CUBLASLT_EPILOGUE_DEFAULT;
    case Epilogue::Bias:
      return CUBLASLT_EPILOGUE_BIAS;
    case Epilogue::Gelu:
      return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case Epilogue::GeluGrad:
      return CUBLASLT_EPILOGUE_DGELU;
  }
  TESSERA_FAIL(InternalError, "unknown epilogue");
}

class Matmul {
 public:
  explicit Matmul(const MatmulArgs& args)
      : args_(args),
        first_(args.b),
        second_(args.a),
        rows_(args.b.size(1)),
        columns_(args.a.size(0)),
        description_(make_description()),
        first_layout_(first_.layout()),
        second_layout_(second_.layout()),
        out_layout_(out_operand().layout()),
        handle_(at::cuda::getCurrentCUDABlasLtHandle()),
        stream_(at::cuda::getCurrentCUDAStream()),
        workspace_(at::empty({static_cast<int64_t>(kWorkspaceBytes)}, args.out.options().dtype(at::kByte))) {}

  void run() const { run_with(algorithm()); }

 private:
  // What decides which algorithms are possible and how fast they are.
  using Shape =
      std::tuple<int, int64_t, int64_t, int64_t, int64_t, int64_t, int, int, Epilogue, uint32_t, uint32_t, uint32_t>;

  Operand out_operand() const {
    Operand out = first_;
    out.data = args_.out.const_data_ptr();
    out.rows = out.leading = rows_;
    out.columns = columns_;
    return out;
  }

  Owned<cublasLtMatmulDesc_t> make_description() const {
    cublasLtMatmulDesc_t made = nullptr;
    check(cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    Owned<cublasLtMatmulDesc_t> description(made, cublasLtMatmulDescDestroy);
    set(made, CUBLASLT_MATMUL_DESC_TRANSA, first_.operation);
    set(made, CUBLASLT_MATMUL_DESC_TRANSB, second_.operation);
    set(made, CUBLASLT_MATMUL_DESC_EPILOGUE, to_cublas(args_.epilogue));
    if (args_.bias.defined()) {
      set(made, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_16BF);
      set(made, CUBLASLT_MATMUL_DESC_BIAS_POINTER, args_.bias.data_ptr());
    }
    if (args_.aux.defined()) {
      set(made, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, args_.aux.data_ptr());
      set(made, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, rows_);
    }
    return description;
  }

  Shape shape() const {
    return {args_.out.get_device(),
            rows_,
            columns_,
            args_.a.size(1),
            first_.leading,
            second_.leading,
            first_.operation,
            second_.operation,
            args_.epilogue,
            alignment(first_.data),
            alignment(second_.data),
            alignment(args_.out.const_data_ptr())};
  }

  std::vector<cublasLtMatmulAlgo_t> candidates() const {
    cublasLtMatmulPreference_t made = nullptr;
    check(cublasLtMatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate");
    const Owned<cublasLtMatmulPreference_t> preference(made, cublasLtMatmulPreferenceDestroy);
    set(made, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
    set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(first_.data));
    set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(second_.data));
    set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(args_.out.const_data_ptr()));
    set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(args_.out.const_data_ptr()));
    cublasLtMatmulHeuristicResult_t found[kAlgorithms];
    int count = 0;
    check(cublasLtMatmulAlgoGetHeuristic(handle_, description_.get(), first_layout_.get(), second_layout_.get(),
                                         out_layout_.get(), out_layout_.get(), made, kAlgorithms, found, &count),
          "cublasLtMatmulAlgoGetHeuristic");
    std::vector<cublasLtMatmulAlgo_t> algorithms;
    for (int i = 0; i < count; i++)
      if (found[i].state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(found[i].algo);
    TESSERA_CHECK(!algorithms.empty(), SystemError, "cuBLASLt has no algorithm for a product of ", args_.a.sizes(),
                  " and ", args_.b.sizes());
    return algorithms;
  }

  cublasLtMatmulAlgo_t algorithm() const {
    static std::mutex mutex;
    static auto* by_shape = new std::map<Shape, cublasLtMatmulAlgo_t>;
    const std::lock_guard lock(mutex);
    const auto found = by_shape->find(shape());
    if (found != by_shape->end()) return found->second;
    const bool measurable = c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None;
    if (!measurable) return candidates()[0];
    const auto measured = cached_result(key(), [&] {
      const auto best = fastest(candidates());
      return std::string(reinterpret_cast<const char*>(&best), sizeof best);
    });
    cublasLtMatmulAlgo_t chosen;
    TESSERA_CHECK(measured.size() == sizeof chosen, InternalError, "a kept algorithm of cuBLASLt has ", measured.size(),
                  " bytes, not ", sizeof chosen);
    std::memcpy(&chosen, measured.data(), sizeof chosen);
    return (*by_shape)[shape()] = chosen;
  }

  // All that the choice of an algorithm depends on, as text.
  std::string key() const {
    std::ostringstream text;
    text << "cublasLt " << cublasLtGetVersion() << '\n'
         << at::cuda::getDeviceProperties(args_.out.get_device())->name << '\n'
         << rows_ << ' ' << columns_ << ' ' << args_.a.size(1) << ' ' << first_.leading << ' ' << second_.leading << ' '
         << first_.operation << ' ' << second_.operation << ' ' << static_cast<int>(args_.epilogue) << ' '
         << alignment(first_.data) << ' ' << alignment(second_.data) << ' ' << alignment(args_.out.const_data_ptr());
    return text.str();
  }

  cublasLtMatmulAlgo_t fastest(const std::vector<cublasLtMatmulAlgo_t>& all) const {
    size_t best = 0;
    float least = 0;
    for (size_t i = 0; i < all.size() && all.size() > 1; i++) {
      at::cuda::CUDAEvent start(cudaEventDefault), stop(cudaEventDefault);
      for (int run = 0; run < kRuns; run++) {
        if (run == 1) start.record();
        run_with(all[i]);
      }
      stop.record();
      stop.synchronize();
      const auto time = start.elapsed_time(stop);
      if (i == 0 || time < least) {
        best = i;
        least = time;
      }
    }
    return all[best];
  }

  void run_with(const cublasLtMatmulAlgo_t& algorithm) const {
    const float one = 1, zero = 0;
    auto* out = args_.out.mutable_data_ptr();
    check(cublasLtMatmul(handle_, description_.get(), &one, first_.data, first_layout_.get(), second_.data,
                         second_layout_.get(), &zero, out, out_layout_.get(), out, out_layout_.get(), &algorithm,
                         workspace_.mutable_data_ptr(), kWorkspaceBytes, stream_),
          "cublasLtMatmul");
  }

  const MatmulArgs& args_;
  const Operand first_, second_;
  const int64_t rows_, columns_;  // of out^T
  const Owned<cublasLtMatmulDesc_t> description_;
  const Owned<cublasLtMatrixLayout_t> first_layout_, second_layout_, out_layout_;
  const cublasLtHandle_t handle_;
  const cudaStream_t stream_;
  const at::Tensor workspace_;
};

}  // namespace

void matmul(const MatmulArgs& args) {
  const c10::cuda::CUDAGuard on(args.out.device());
  Matmul(args).run();
}

}  // namespace tessera::cuda
