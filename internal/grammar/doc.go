// Package grammar binds a model's text to a language: a JSON Schema, any JSON object, a
// regular expression, a choice of strings, or a context-free grammar. For each place in a text
// it says which tokens may come next, so that the sampler draws among these only.
//
//	v := grammar.NewVocabulary(tokens, ends)                // once for each model
//	c := grammar.NewCache(v, grammar.Limits{}, 256<<20)     // once for each model
//	g, err := c.Get(ctx, grammar.Spec{Kind: grammar.JSONSchema, Text: schema})
//	m := g.Matcher()                                        // once for each text
//	for !m.Ended() {
//		m.Mask(bits)                                        // which tokens may come
//		m.Accept(sample(bits))
//	}
//
// A mask is exact: a token is in it if and only if the text with the token is still the
// beginning of a member of the language. Texts are bytes, so that a token may end in the
// middle of a character. A matcher is a function of the Spec, the vocabulary and the tokens
// accepted: another process rebuilds it by accepting the same tokens.
//
// Hostile grammars are refused with an *Error, and what a grammar may cost while it runs is
// bounded (Limits). DESIGN.md says how it works, and what of each language is supported.
package grammar
