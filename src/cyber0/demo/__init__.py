"""`cyber0 demo`: a page on which one changes who lies, how, and the rule, and watches a federation learn."""
