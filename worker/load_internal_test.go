package worker

import (
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/model"
)

// A GPU computes in fp16 if told to, or if the checkpoint is fp16 and nothing else is asked for.
func TestDType(t *testing.T) {
	f := func(want bool, torchDType string, change func(*Config)) {
		t.Helper()
		cfg := DefaultConfig(fleet.Decode)
		change(&cfg)
		if err := cfg.Validate(); err != nil {
			t.Fatal(err)
		}
		if got := fp16(&cfg, &model.Model{TorchDType: torchDType}); got != want {
			t.Errorf("torch_dtype %q, dtype %s, kv_cache_dtype %s, quantization %s: fp16 is %v", torchDType, cfg.DType, cfg.KVCacheDType, cfg.Quantization, got)
		}
	}
	auto := func(*Config) {}
	f(true, "float16", auto)
	f(false, "bfloat16", auto)
	f(false, "float32", auto)
	f(false, "", auto)
	f(false, "float16", func(c *Config) { c.DType = "bf16" })
	f(true, "bfloat16", func(c *Config) { c.DType = "fp16" })
	f(true, "float16", func(c *Config) { c.BatchInvariant = true })
	f(true, "float16", func(c *Config) { c.Quantization = "none" })
	f(false, "float16", func(c *Config) { c.Quantization = "fp8" })
	f(false, "float16", func(c *Config) { c.KVCacheDType = "fp8" })
	f(false, "float16", func(c *Config) { c.KVCacheDType = "bf16" })
}
