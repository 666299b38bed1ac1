package kerneltest

import "github.com/xpyd/xpyd/kvlayout"

// Layouts are small pools of every kind, with blocks of blockTokens tokens.
func Layouts(blockTokens int) map[string]kvlayout.Layout {
	heads := func(n int) kvlayout.Heads { return kvlayout.Heads{Count: n, Total: n} }
	groups := func(g ...kvlayout.Group) kvlayout.Layout {
		return kvlayout.Layout{BlockTokens: blockTokens, Groups: g}
	}
	latent := []kvlayout.Plane{{Name: "latent", Dim: 32}, {Name: "rope", Dim: 8}}
	return map[string]kvlayout.Layout{
		"gqa": kvlayout.Plain(2, 2, 8, blockTokens, kvlayout.F32),
		"fp8": kvlayout.Plain(2, 2, 16, blockTokens, kvlayout.F8E4M3),
		"mla": groups(kvlayout.Group{Kind: kvlayout.Latent, Layers: kvlayout.Run(0, 3), Planes: latent, Heads: heads(1), DType: kvlayout.BF16}),
		"interleaved windows": groups(
			kvlayout.Group{Kind: kvlayout.Window, Layers: kvlayout.Every(0, 2, 2), Planes: kvlayout.KV(4), Heads: heads(3), Window: 128, DType: kvlayout.BF16},
			kvlayout.Group{Kind: kvlayout.Full, Layers: kvlayout.Every(1, 2, 2), Planes: kvlayout.KV(8), Heads: heads(2), DType: kvlayout.F32}),
		"rank": groups(kvlayout.Group{Kind: kvlayout.Full, Layers: kvlayout.Run(0, 2), Planes: kvlayout.KV(8),
			Heads: kvlayout.Heads{First: 4, Count: 2, Total: 8}, DType: kvlayout.F16}),
		"all of it": groups(
			kvlayout.Group{Kind: kvlayout.Latent, Layers: kvlayout.Layers{1}, Planes: latent, Heads: heads(1), DType: kvlayout.F8E4M3, Scale: kvlayout.F32},
			kvlayout.Group{Kind: kvlayout.Window, Layers: kvlayout.Layers{0, 3}, Planes: kvlayout.KV(4), Heads: heads(3), Window: 64, DType: kvlayout.F32},
			kvlayout.Group{Kind: kvlayout.Full, Layers: kvlayout.Layers{2}, Planes: []kvlayout.Plane{{Name: "k", Dim: 12}, {Name: "v", Dim: 6}},
				Heads: kvlayout.Heads{First: 1, Count: 2, Total: 3}, DType: kvlayout.BF16}),
	}
}
